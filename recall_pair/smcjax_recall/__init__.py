"""The recall pair's models: data that `smcjax.model.files.hub` reads."""
