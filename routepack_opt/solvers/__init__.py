"""How it is optimised: engines that know arrays, cells and ranks, and nothing of MoE."""
