"""`chunk_kda` on a GPU: which kernels run, in which order, on which cut of the sequences.

    forward.py    prepare -> enter (segments only: summary, fold) -> scan
    backward.py   scan in reverse (segments: summary, fold) -> the parallel part
    autograd.py   both as one differentiable function      states.py   the forward pass, with states from inside
    plan.py       chunks and segments                      support.py  which calls come here at all

Each stage runs as a CUDA kernel (`ops.kda.cuda`) where that kernel takes the call, else as a Triton kernel
(`ops.kda.triton`); a CUDA kernel's `unsuitable` says why it does not. Calls that take CUDA kernels throughout are laid out once:

    known.py      a call like one before, found again     forms.py, form_backward.py   what is laid out, and how it is queued
"""
