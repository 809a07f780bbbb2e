"""`python look.py REQUEST`: what doctor finds of this network alone, as JSON; no other node is called."""

import json
import sys

from unisono.doctor.asked import DoctorRequest
from unisono.doctor.looking import look_here
from unisono.doctor.network.checks import CHECKS

facts = look_here(DoctorRequest(**json.loads(sys.argv[1])))
print(json.dumps([finding.to_json() for check in CHECKS for finding in check(facts)]))
