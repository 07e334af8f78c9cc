"""Which parallel degrees, schedule and sharding train a model best?"""
