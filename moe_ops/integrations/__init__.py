"""moe_ops inside packages of others: each module here is written against one of them.

None is imported with moe_ops. docs/INTEGRATIONS.md says how each is switched on.
"""
