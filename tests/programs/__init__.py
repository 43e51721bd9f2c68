"""Programs that tests run in processes of their own, and the model that they share."""
