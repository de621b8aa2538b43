// Element types to fp32 and back, one number at a time; and keys. Included into the namespace of an
// instruction set (levels.h).

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "payloads are, and are copied as they lie");

struct Float32 {
  using Stored = float;
  static constexpr float kLargest = FLT_MAX;
  static float widen(float value) { return value; }
  static float narrow(float value) { return canonical<std::uint32_t>(value, kNanFloat32); }
};

struct BFloat16 {
  using Stored = std::uint16_t;
  static constexpr float kLargest = 0x1.FEp127F;
  static float widen(std::uint16_t bits) { return bits_as<float>(std::uint32_t{bits} << 16); }
  static std::uint16_t narrow(float value) {
    return static_cast<std::uint16_t>(round_to_bfloat16<std::uint32_t>(value) >> 16);
  }
};

struct Float16 {
  using Stored = std::uint16_t;
  static constexpr float kLargest = 65504.0F;
  static float widen(std::uint16_t bits) {
    return float_from<Dtype::kFloat16, float>(std::uint32_t{bits});
  }
  static std::uint16_t narrow(float value) {
    return static_cast<std::uint16_t>(rounded_to<Dtype::kFloat16, std::uint32_t>(value));
  }
};

// The nearest number that is finite. NaN stays.
template <class Type>
inline typename Type::Stored narrow_saturated(float value) {
  const float above = value > Type::kLargest ? Type::kLargest : value;
  return Type::narrow(above < -Type::kLargest ? -Type::kLargest : above);
}

// Calls function(Type{}) for the type of that name.
template <class Function>
inline auto with_type(Dtype dtype, Function function) {
  switch (dtype) {
    case Dtype::kFloat16:
      return function(Float16{});
    case Dtype::kBFloat16:
      return function(BFloat16{});
    default:
      return function(Float32{});
  }
}

constexpr std::uint32_t kMagnitude = 0x7FFFFFFF;
constexpr std::uint32_t kInfinity = 0x7F800000;  // the least key that is of no finite number

inline std::uint32_t key_of(float value) { return bits_as<std::uint32_t>(value) & kMagnitude; }
