"""What a step costs, before anything is rented: memory, seconds and layouts by prediction."""
