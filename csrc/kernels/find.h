// Which kernels do what. After combine.h, in the same namespace.

template <class Codec, class Op, bool kAverage = false>
Kernels ordered() {
  return {reduce_ordered<Codec, Op, kAverage>, combine_ordered<Codec, Op, kAverage>};
}

template <class Codec, class Op>
Kernels folded() {
  return {reduce_folded<Codec, Op>, combine_folded<Codec, Op>};
}

// The codecs are what the table says; so a type of another width cannot get another's kernels.
template <Dtype kType, class Codec>
constexpr bool fits() {
  return sizeof(typename Codec::Stored) == traits_of(kType).size &&
         sizeof(typename Codec::Accumulator) == traits_of(kType).accumulator;
}

template <Dtype kType, class Codec>
Kernels find_float(ReduceOp op) {
  static_assert(fits<kType, Codec>() && traits_of(kType).numbers == Numbers::kFloat);
  switch (op) {
    case ReduceOp::kSum:
      return ordered<Codec, Sum>();
    case ReduceOp::kAvg:
      return ordered<Codec, Sum, true>();
    case ReduceOp::kProd:
      return ordered<Codec, Product>();
    case ReduceOp::kMin:
      return folded<Codec, Minimum>();
    case ReduceOp::kMax:
      return folded<Codec, Maximum>();
    default:
      return {};
  }
}

template <Dtype kType, class T>
Kernels find_integer(ReduceOp op) {
  static_assert(fits<kType, Plain<T>>() && traits_of(kType).numbers != Numbers::kFloat);
  using U = std::make_unsigned_t<T>;
  switch (op) {
    case ReduceOp::kSum:
      return folded<Plain<U>, Sum>();
    case ReduceOp::kProd:
      return folded<Plain<U>, Product>();
    case ReduceOp::kMin:
      return folded<Plain<T>, Least>();
    case ReduceOp::kMax:
      return folded<Plain<T>, Greatest>();
    case ReduceOp::kBand:
      return folded<Plain<U>, And>();
    case ReduceOp::kBor:
      return folded<Plain<U>, Or>();
    case ReduceOp::kBxor:
      return folded<Plain<U>, Xor>();
    default:
      return {};
  }
}

Kernels find(Dtype dtype, ReduceOp op) {
  switch (dtype) {
    case Dtype::kFloat16:
      return find_float<Dtype::kFloat16, Float16>(op);
    case Dtype::kBFloat16:
      return find_float<Dtype::kBFloat16, BFloat16>(op);
    case Dtype::kFloat32:
      return find_float<Dtype::kFloat32, Float32>(op);
    case Dtype::kFloat64:
      return find_float<Dtype::kFloat64, Float64>(op);
    case Dtype::kInt8:
      return find_integer<Dtype::kInt8, std::int8_t>(op);
    case Dtype::kInt16:
      return find_integer<Dtype::kInt16, std::int16_t>(op);
    case Dtype::kInt32:
      return find_integer<Dtype::kInt32, std::int32_t>(op);
    case Dtype::kInt64:
      return find_integer<Dtype::kInt64, std::int64_t>(op);
    case Dtype::kUInt8:
      return find_integer<Dtype::kUInt8, std::uint8_t>(op);
    case Dtype::kBool:  // 0 and 1: the least is their and, the greatest their or
      return find_integer<Dtype::kBool, std::uint8_t>(op);
  }
  return {};
}
