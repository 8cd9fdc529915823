"""What runs on the guest's side: of a `proc` sandbox a fork server, the set-up of namespaces and the agent that is process 1; of a virtual
machine the images that it boots (`build_image.py`, `archive.py`) and their agent (`vm/`, in C).

The former use the standard library only; no module is imported after the root has been changed (`agent.py` makes sure of it).
"""
