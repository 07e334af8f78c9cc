"""How many GPUs of which type, and which request goes where?"""
