"""Memory mechanisms, one file each; a new one is its file and a line here."""

from memjax.mechanisms.attention import attention as attention
from memjax.mechanisms.base import Mechanism as Mechanism
from memjax.mechanisms.base import reset as reset
from memjax.mechanisms.delta_rule import delta_rule as delta_rule
from memjax.mechanisms.elastic_memory import elastic_memory as elastic_memory
from memjax.mechanisms.sliding_window import sliding_window as sliding_window
