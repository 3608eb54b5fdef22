"""libmoe_ops: the ops and the kernels for CPUs as one shared library, for processes without Python
that run what AOTInductor made, and for those with it. docs/CPP.md says how it is used.
"""
