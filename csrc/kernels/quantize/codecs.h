// The codecs that there are: each one's header, and its row. After frame.h, in the same namespace.

#include "kernels/quantize/int8.h"
#include "kernels/quantize/one_bit.h"

constexpr QuantizeCodec kCodecs[] = {
    row_of<OneBit>(),
    row_of<Int8>(),
};
