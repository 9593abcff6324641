"""What agents play: the protocol, the text around it, the worlds, and exact reference players. No
torch.
"""
