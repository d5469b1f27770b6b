"""Text for language models: bundled corpus, local files, hub datasets; tokenizer; rows of tokens."""

from kvshift.lab.data.config import DataConfig, check_data_config
from kvshift.lab.data.packing import collate
from kvshift.lab.data.text import TextData, load_text_data
from kvshift.lab.data.tokenizers import check_tokenizer, load_tokenizer

__all__ = [
    "DataConfig",
    "TextData",
    "check_data_config",
    "check_tokenizer",
    "collate",
    "load_text_data",
    "load_tokenizer",
]
