"""Operations become a graph of bytes and seconds."""
