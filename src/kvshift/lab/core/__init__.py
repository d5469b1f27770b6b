"""What every part of the lab needs, and which needs none of them: errors, messages, seeds, files, statistics."""
