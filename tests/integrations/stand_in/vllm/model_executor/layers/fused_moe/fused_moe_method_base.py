"""What runs the experts of a layer."""


class FusedMoEMethodBase:
    def __init__(self, moe):
        super().__init__()
        self.moe = moe
        self.moe_quant_config = None
        self.moe_kernel = None

    @property
    def supports_eplb(self):
        return False

    @property
    def is_monolithic(self):
        return self.experts_cls.is_monolithic()
