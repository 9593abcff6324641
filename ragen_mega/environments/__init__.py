"""Environments: the protocol, the text around it, the worlds, and exact reference players. This
package imports no torch.
"""
