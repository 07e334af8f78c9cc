"""Which expert, and how many copies of it, on which device?"""
