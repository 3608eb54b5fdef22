from enum import IntEnum


class ActivationType(IntEnum):
    Swiglu = 3
    Relu2 = 6
    GegluTanh = 8


class RoutingMethodType(IntEnum):
    Default = (0,)
    Renormalize = (1,)
    DeepSeekV3 = (2,)
    Llama4 = (3,)
    RenormalizeNaive = (4,)
    TopK = (5,)
    SigmoidRenorm = (6,)
    MiniMax2 = (7,)
    Sigmoid = (8,)
    TopKSigmoid = (9,)


class Fp8QuantizationType(IntEnum):
    DeepSeekFp8 = 1
    MxFp8 = 2


class SfLayout(IntEnum):
    layout_linear = 2
