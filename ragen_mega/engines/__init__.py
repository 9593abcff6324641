"""Rollout engines behind the protocol of `rollout.engine`: one in this process, one that runs
SGLang servers.
"""
