"""The recall pair's models: data that `smcjax.model.hub` reads."""
