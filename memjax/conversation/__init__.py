"""Conversations with a model that has a lasting memory in a folder.

    with Conversation.open("runs/mplus", "memories/book") as talk:
        talk.inject(Path("book.txt").read_text(), name="book.txt")
        print(talk.query("Who is the heroine?").text)
        print(talk.chat("And her friend?").text)

The same folder continues the conversation in another process.
"""

from memjax.conversation.answer import Answer as Answer
from memjax.conversation.conversation import Conversation as Conversation
from memjax.conversation.memory_folder import MemoryFolder as MemoryFolder
from memjax.conversation.record import Entry as Entry
from memjax.conversation.record import Record as Record
