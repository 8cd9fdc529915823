"""Text to ids and back: byte tokenizer, byte-level BPE, published rank files, and the K3 chat format."""

from perilune.tokenizer.bpe import BPETokenizer, train_bpe
from perilune.tokenizer.byte import ByteTokenizer
from perilune.tokenizer.interface import StreamDecoder, Tokenizer
from perilune.tokenizer.load import load_tokenizer
from perilune.tokenizer.special import SpecialTokens
from perilune.tokenizer.tiktoken_file import TiktokenTokenizer

__all__ = [
    "BPETokenizer",
    "ByteTokenizer",
    "SpecialTokens",
    "StreamDecoder",
    "TiktokenTokenizer",
    "Tokenizer",
    "load_tokenizer",
    "train_bpe",
]
