from enum import IntEnum


class ActivationType(IntEnum):
    Swiglu = 3
    Relu2 = 6
    GegluTanh = 8
