// Floats of the C++ for the CPU: an exponential that compilers vectorise, and bf16.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

// exp(x) for x <= 0, within two units in the last place; 0 below -87. NaN stays NaN.
inline float exponential(float x) {
  const float bounded = x < -87.0f ? -87.0f : x;
  const float power = (bounded * 1.44269504f + 12582912.0f) - 12582912.0f;  // the nearest integer
  const float rest = (bounded - power * 0.693359375f) + power * 2.12194440e-4f;
  float series = 1.9875691500e-4f;
  series = series * rest + 1.3981999507e-3f;
  series = series * rest + 8.3334519073e-3f;
  series = series * rest + 4.1665795894e-2f;
  series = series * rest + 1.6666665459e-1f;
  series = series * rest + 5.0000001201e-1f;
  series = series * rest * rest + rest + 1.0f;
  const int32_t bits = (static_cast<int32_t>(power) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof(scale));
  return x < -87.0f ? 0.0f : series * scale;
}

struct BFloat16 {
  uint16_t bits;
};

inline float wide(float x) { return x; }
inline float wide(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline void narrow(float x, float& to) { to = x; }
inline void narrow(float x, BFloat16& to) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  to.bits = static_cast<uint16_t>(x != x ? 0x7FC0u : (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace
