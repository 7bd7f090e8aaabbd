"""Training: the update as a pure function, sharding, checkpoints and the loop."""

from memjax.training.config import LoopConfig as LoopConfig
from memjax.training.config import Outcome as Outcome
from memjax.training.distributed.sharding import MeshConfig as MeshConfig
from memjax.training.loop import train as train
from memjax.training.optimizer import OptimizerConfig as OptimizerConfig
from memjax.training.optimizer import make_optimizer as make_optimizer
from memjax.training.step import StepConfig as StepConfig
from memjax.training.step import TrainState as TrainState
from memjax.training.step import init_train_state as init_train_state
from memjax.training.step import make_train_step as make_train_step
