"""Real documents, streamed and resettable: sources, tokens, pipelines, tasks."""

from memjax.data.batch import Batch as Batch
from memjax.data.documents import Document as Document
from memjax.data.documents import Split as Split
from memjax.data.documents import assign_splits as assign_splits
from memjax.data.niah import NEEDLE_TASKS as NEEDLE_TASKS
from memjax.data.niah import NeedleSample as NeedleSample
from memjax.data.niah import NeedleTask as NeedleTask
from memjax.data.niah import needle_batch as needle_batch
from memjax.data.niah import needle_sample as needle_sample
from memjax.data.pipeline import BatchIterator as BatchIterator
from memjax.data.pipeline import chunked_batches as chunked_batches
from memjax.data.pipeline import streamed_batches as streamed_batches
from memjax.data.sources import open_documents as open_documents
from memjax.data.synthetic import associative_recall as associative_recall
from memjax.data.synthetic import copy_task as copy_task
from memjax.data.synthetic import multi_query_recall as multi_query_recall
from memjax.data.tokenizer import Tokenizer as Tokenizer
from memjax.data.tokenizer import load_tokenizer as load_tokenizer
from memjax.data.tokens import TokenisedDocument as TokenisedDocument
from memjax.data.tokens import load_tokens as load_tokens
