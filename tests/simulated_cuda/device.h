// What every part of the simulation shares: the memory of the devices, and counters of what is asked of them.
#pragma once
#include <cstddef>
#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace simulated {

enum Counter {
  LAUNCH,
  PRODUCT,
  STREAM_WAIT,
  DEVICE_WAIT,
  EVENT_WAIT,
  EVENT_RECORD,
  EVENT_QUERY,
  TO_HOST,
  FROM_HOST,
  ON_DEVICE,
  FILL,
  MALLOC,
  FREE,
  MEMORY_QUERY,
  COUNTERS
};

constexpr size_t PAGE = size_t{2} << 20;  // what cudaMalloc hands out is rounded up to this

size_t setting(const char* name, size_t otherwise);
void count(Counter which);
void count_launch(const void* kernel);
void name_kernel(const void* kernel, const char* name);

int devices();
size_t total_bytes();
size_t free_bytes(int device);
size_t used_bytes(int device);
size_t& most_used_bytes(int device);  // since it was last set
void* allocate(size_t bytes, int device, size_t rounding = PAGE);  // null when the device is full
bool release(void* address);
int device_of(const void* address);  // -1 for the host's memory
void* allocate_pinned(size_t bytes);
void release_pinned(void* address);
bool is_pinned(const void* address);

// Memory without an address, which expandable segments map where they want it.
bool charge(size_t bytes, int device);
void discharge(size_t bytes, int device);
void map(void* address, size_t bytes, int device);
void unmap(void* address, size_t bytes);

}  // namespace simulated
