"""OV and QK maps as factors, and exact questions about them."""
