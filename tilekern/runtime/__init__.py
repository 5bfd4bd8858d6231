"""Call time: from a spec and sizes to the plan that is launched, what a miss does, what is counted."""
