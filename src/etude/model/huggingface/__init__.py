"""Reading and writing of Hugging Face directories: `config.json` and safetensors, one file or many."""

from etude.model.huggingface.checkpoint import check_memory as check_memory
from etude.model.huggingface.checkpoint import from_huggingface as from_huggingface
from etude.model.huggingface.checkpoint import load_draft_layers as load_draft_layers
from etude.model.huggingface.checkpoint import load_model as load_model
from etude.model.huggingface.checkpoint import outline_model as outline_model
from etude.model.huggingface.checkpoint import save_model as save_model
from etude.model.huggingface.checkpoint import to_huggingface as to_huggingface
from etude.model.huggingface.fields import read_fields as read_fields
