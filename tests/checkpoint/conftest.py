from tiny_checkpoint import folder as folder
