"""The learned slow loop: a masked Double DQN that scores candidate edits (docs/residency-dqn.md).

Candidates and features need no torch; network, replay memory, training and checkpoints do.
"""
