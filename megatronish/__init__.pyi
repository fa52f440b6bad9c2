"""Public API of megatronish, by group. `__init__.py` loads a name from the module that is named here."""

# Whole runs
# Checkpoints
from megatronish.checkpoint.folder import find_checkpoint as find_checkpoint
from megatronish.checkpoint.load import load_tensors as load_tensors
from megatronish.checkpoint.save import save_checkpoint as save_checkpoint
from megatronish.commands.configuration import read_config as read_config
from megatronish.commands.language_model import LanguageModel as LanguageModel
from megatronish.commands.pretrain import pretrain as pretrain

# Configuration
from megatronish.config.config import Config as Config
from megatronish.config.sections.data import DataConfig as DataConfig
from megatronish.config.sections.model import ModelConfig as ModelConfig
from megatronish.config.sections.optimizer import OptimizerConfig as OptimizerConfig
from megatronish.config.sections.parallel import ParallelConfig as ParallelConfig
from megatronish.config.sections.run import CheckpointConfig as CheckpointConfig
from megatronish.config.sections.run import LogConfig as LogConfig
from megatronish.config.sections.training import RecomputeConfig as RecomputeConfig
from megatronish.config.sections.training import TrainingConfig as TrainingConfig

# Errors
from megatronish.core.errors import RunError as RunError
from megatronish.core.errors import UserError as UserError
from megatronish.core.layout import Layout as Layout
from megatronish.data.datasets import DATASETS as DATASETS
from megatronish.data.indexed import IndexedTokens as IndexedTokens
from megatronish.data.indexed import IndexedWriter as IndexedWriter
from megatronish.data.loader import BatchShare as BatchShare

# Data
from megatronish.data.loader import Collator as Collator
from megatronish.data.loader import micro_batches as micro_batches
from megatronish.data.mock import MockSamples as MockSamples
from megatronish.data.preprocess import preprocess as preprocess
from megatronish.data.sample import Dataset as Dataset
from megatronish.data.sample import Sample as Sample
from megatronish.engine.build import build_engine as build_engine
from megatronish.engine.engine import Engine as Engine
from megatronish.engine.engine import StepResult as StepResult

# Trained models
from megatronish.formats.convert import convert as convert
from megatronish.formats.hf.families import FAMILIES as FAMILIES
from megatronish.inference.generate import GeneratedToken as GeneratedToken
from megatronish.inference.generate import Sampling as Sampling
from megatronish.inference.generate import generate as generate
from megatronish.inference.load import load_model as load_model

# Ranks
from megatronish.launch.place import Place as Place
from megatronish.layers.linear import ColumnParallelLinear as ColumnParallelLinear
from megatronish.layers.linear import RowParallelLinear as RowParallelLinear
from megatronish.layers.norm import Norm as Norm

# Model
from megatronish.layers.vocabulary import VocabParallelEmbedding as VocabParallelEmbedding
from megatronish.model.attention import Attention as Attention
from megatronish.model.attention import CoreAttention as CoreAttention
from megatronish.model.batch import MicroBatch as MicroBatch
from megatronish.model.block import TransformerBlock as TransformerBlock
from megatronish.model.context import Context as Context
from megatronish.model.gpt import GPT as GPT

# Training
from megatronish.objectives.objective import Objective as Objective
from megatronish.objectives.table import OBJECTIVES as OBJECTIVES
from megatronish.optim.optimizer import OPTIMIZERS as OPTIMIZERS
from megatronish.optim.schedules import DECAYS as DECAYS
from megatronish.optim.schedules import BatchSizeSchedule as BatchSizeSchedule
from megatronish.optim.schedules import LearningRateSchedule as LearningRateSchedule
from megatronish.optim.schedules import build_learning_rate_schedule as build_learning_rate_schedule
from megatronish.parallel.mesh import Axis as Axis
from megatronish.parallel.mesh import Mesh as Mesh
from megatronish.parallel.mesh import TensorParallel as TensorParallel
from megatronish.parallel.mesh import leave as leave
from megatronish.parallel.schedules.simulate import Costs as Costs
from megatronish.parallel.schedules.simulate import simulate as simulate
from megatronish.parallel.schedules.table import SCHEDULES as SCHEDULES
from megatronish.parallel.schedules.table import PipelineSchedule as PipelineSchedule

# Pipeline schedules
from megatronish.parallel.schedules.timeline import draw as draw
from megatronish.parallel.sharding import Sharding as Sharding
from megatronish.tokenizer.build import build_tokenizer as build_tokenizer
from megatronish.tokenizer.tokenizer import Tokenizer as Tokenizer
from megatronish.train.checkpoint_state import tensors_of as tensors_of
from megatronish.train.embedded import train_rank as train_rank
from megatronish.train.trainer import Hook as Hook
from megatronish.train.trainer import Progress as Progress
from megatronish.train.trainer import StepRecord as StepRecord
from megatronish.train.trainer import Trainer as Trainer
from megatronish.train.trainer import TrainingSchedule as TrainingSchedule

__version__: str
