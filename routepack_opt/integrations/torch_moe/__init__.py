"""EP x EDP trainer in torch.distributed: planned cells, experts that move with their optimizer state.

| room | holds |
| --- | --- |
| ``model`` | the decoder with routed experts |
| ``huggingface`` | its configurations, names and weights |
| ``parallel`` | process groups, dispatch by slot, gradients, optimizer state |
| ``step`` | one optimizer step over planned cells, with replayed routes |
| ``movement`` | experts change rank, in two waves |
| ``checkpoint`` | saved and loaded in logical order |
| ``processes`` | one process a rank |
| ``grpo`` | the reinforcement-learning job of ``routepack train`` |
"""
