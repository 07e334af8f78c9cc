"""Which rank on which node, where links differ?"""
