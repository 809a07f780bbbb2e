"""A module that leaves a thread behind as it is imported."""

import threading
import time

threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
