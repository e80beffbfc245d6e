from hvdtrain.adapters.base import Adapter as Adapter
from hvdtrain.adapters.save import Save as Save
from hvdtrain.adapters.select import adapter as adapter
from hvdtrain.config.strategies import CommOptions as CommOptions
from hvdtrain.errors import CheckpointError as CheckpointError
from hvdtrain.errors import HvdtrainError as HvdtrainError
from hvdtrain.errors import TrainingError as TrainingError
from hvdtrain.errors import UsageError as UsageError
from hvdtrain.steps.learning_rate import LearningRate as LearningRate
from hvdtrain.steps.sharding import Part as Part
from hvdtrain.steps.sharding import Position as Position
from hvdtrain.steps.sharding import Shards as Shards
from hvdtrain.steps.world import World as World

__version__: str
__all__: list[str]
