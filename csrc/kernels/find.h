// Which kernels do what. After combine.h, in the same namespace.

template <class Codec, class Op, bool kAverage = false>
Kernels ordered() {
  return {reduce_ordered<Codec, Op, kAverage>, combine_ordered<Codec, Op, kAverage>};
}

template <class Codec, class Op>
Kernels folded() {
  return {reduce_folded<Codec, Op>, combine_folded<Codec, Op>};
}

template <class Codec>
Kernels find_float(ReduceOp op) {
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

template <class T>
Kernels find_integer(ReduceOp op) {
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
      return find_float<Float16>(op);
    case Dtype::kBFloat16:
      return find_float<BFloat16>(op);
    case Dtype::kFloat32:
      return find_float<Float32>(op);
    case Dtype::kFloat64:
      return find_float<Float64>(op);
    case Dtype::kInt8:
      return find_integer<std::int8_t>(op);
    case Dtype::kInt16:
      return find_integer<std::int16_t>(op);
    case Dtype::kInt32:
      return find_integer<std::int32_t>(op);
    case Dtype::kInt64:
      return find_integer<std::int64_t>(op);
    case Dtype::kUInt8:
    case Dtype::kBool:  // 0 and 1: the least is their and, the greatest their or
      return find_integer<std::uint8_t>(op);
  }
  return {};
}
