// The codecs that there are: each one's header, and its row. After frame.inl, in the same
// namespace.

#include "kernels/quantize/int8.inl"
#include "kernels/quantize/one_bit.inl"

constexpr QuantizeCodec kCodecs[] = {
    row_of<OneBit>(),
    row_of<Int8>(),
};
