"""What agents play: the protocol, the text around it, the worlds, and exact players to compare
with. No torch.
"""
