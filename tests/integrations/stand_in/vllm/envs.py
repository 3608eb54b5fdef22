"""vLLM reads these from the environment."""

VLLM_PLUGINS: list[str] | None = None
