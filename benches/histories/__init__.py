"""Random histories of chats, as clients and frameworks themselves write them."""
