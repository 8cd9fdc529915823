"""What runs on the guest's side of a `proc` sandbox: a fork server, the set-up of namespaces, the agent that is process 1.

Standard library only; no module is imported after the root has been changed (`agent.py` makes sure of it).
"""
