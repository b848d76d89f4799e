"""What a tenant sees of its bills, and what anybody may see of the seller: one file a resource.

Knows: routes, answers, whose key may read what. Does not know: how anything is decided (billing) or counted (metering).
"""
