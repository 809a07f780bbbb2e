"""`python network_findings.py REQUEST`: what doctor finds of this network alone, as JSON; no other
node is called.
"""

import json
import sys

from unisono.front.checks.check import DoctorRequest, read_surroundings
from unisono.front.checks.machine_checks import NETWORK_CHECKS

facts = read_surroundings(DoctorRequest(**json.loads(sys.argv[1])))
print(json.dumps([finding.to_json() for check in NETWORK_CHECKS for finding in check(facts)]))
