// Memory of the simulated devices, which is the host's, and the counters that tests read.
#include "device.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

namespace simulated {
namespace {

constexpr int MOST_DEVICES = 16;
constexpr size_t ARENA = size_t{1} << 43;
constexpr size_t KEPT = size_t{64} << 20;  // smaller blocks leave their pages to the next one: faults take time
constexpr const char* NAMES[COUNTERS] = {"launches", "products", "stream_waits", "device_waits", "event_waits",
                                         "event_records", "event_queries", "copies_to_host", "copies_from_host",
                                         "copies_on_device", "fills", "mallocs", "frees", "memory_queries"};

struct Block {
  size_t bytes;  // of addresses
  int device;
  size_t taken;
};

std::mutex mutex;
std::map<char*, Block> blocks;
std::map<char*, size_t> pinned;  // of the host
std::array<size_t, MOST_DEVICES> used, most_used, taken_by_others;
std::array<std::atomic<long>, COUNTERS> counters;

// Kernels register before this file's own variables are made: hence variables inside functions.
std::unordered_map<const void*, std::string>& kernel_names() {
  static auto* names = new std::unordered_map<const void*, std::string>;
  return *names;
}

std::unordered_map<std::string, long>& launches() {
  static auto* found = new std::unordered_map<std::string, long>;
  return *found;
}

size_t taken(int device) {
  static const size_t context = setting("SIMULATED_CUDA_CONTEXT", size_t{512} << 20);
  return used[device] + taken_by_others[device] + context;
}

char* arena() {
  static char* start = [] {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;  // pages cost nothing until they are written to
    void* found = mmap(nullptr, ARENA + PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (found == MAP_FAILED) abort();
    return (char*)((size_t(found) + PAGE - 1) / PAGE * PAGE);
  }();
  return start;
}

bool grows_down() {
  static const char* order = getenv("SIMULATED_CUDA_ADDRESSES");
  return order && !strcmp(order, "down");
}

char* lowest_gap(size_t bytes) {
  char* place = arena();
  for (auto& [address, block] : blocks) {
    if (address < arena() || address >= arena() + ARENA) continue;
    if (size_t(address - place) >= bytes) break;
    place = address + block.bytes;
  }
  return place;
}

char* highest_gap(size_t bytes) {
  char* end = arena() + ARENA;
  for (auto each = blocks.rbegin(); each != blocks.rend(); ++each) {
    auto& [address, block] = *each;
    if (address < arena() || address >= arena() + ARENA) continue;
    if (size_t(end - (address + block.bytes)) >= bytes) break;
    end = address;
  }
  return end - bytes;
}

}  // namespace

size_t setting(const char* name, size_t otherwise) {
  const char* text = getenv(name);
  return text ? strtoull(text, nullptr, 0) : otherwise;
}

void count(Counter which) { counters[which]++; }

void count_launch(const void* kernel) {
  count(LAUNCH);
  std::lock_guard guard(mutex);
  auto found = kernel_names().find(kernel);
  launches()[found == kernel_names().end() ? "unnamed" : found->second]++;
}

void name_kernel(const void* kernel, const char* name) {
  std::lock_guard guard(mutex);
  kernel_names()[kernel] = name;
}

int devices() {
  static const int number = int(setting("SIMULATED_CUDA_DEVICES", 1));
  return number;
}

size_t total_bytes() {
  static const size_t bytes = setting("SIMULATED_CUDA_MEMORY", 150754820096);  // an H200's
  return bytes;
}

size_t free_bytes(int device) {
  std::lock_guard guard(mutex);
  return taken(device) > total_bytes() ? 0 : total_bytes() - taken(device);
}

size_t used_bytes(int device) {
  std::lock_guard guard(mutex);
  return used[device];
}

size_t& most_used_bytes(int device) { return most_used[device]; }

bool charge(size_t bytes, int device) {
  std::lock_guard guard(mutex);
  if (taken(device) + bytes > total_bytes()) return false;
  used[device] += bytes;
  most_used[device] = std::max(most_used[device], used[device]);
  return true;
}

void discharge(size_t bytes, int device) {
  std::lock_guard guard(mutex);
  used[device] -= bytes;
}

void* allocate(size_t bytes, int device, size_t rounding) {
  size_t taken = (bytes + rounding - 1) / rounding * rounding;
  bytes = (bytes + PAGE - 1) / PAGE * PAGE;
  if (!charge(taken, device)) return nullptr;
  std::lock_guard guard(mutex);
  char* address = grows_down() ? highest_gap(bytes) : lowest_gap(bytes);
  blocks[address] = {bytes, device, taken};
  return address;
}

bool release(void* address) {
  std::lock_guard guard(mutex);
  auto found = blocks.find((char*)address);
  if (found == blocks.end()) return false;
  auto [bytes, device, taken] = found->second;
  if (bytes > KEPT) madvise(address, bytes, MADV_DONTNEED);
  used[device] -= taken;
  blocks.erase(found);
  return true;
}

void map(void* address, size_t bytes, int device) {
  mprotect(address, bytes, PROT_READ | PROT_WRITE);
  std::lock_guard guard(mutex);
  blocks[(char*)address] = {bytes, device, bytes};
}

void unmap(void* address, size_t bytes) {
  std::lock_guard guard(mutex);
  blocks.erase(blocks.lower_bound((char*)address), blocks.lower_bound((char*)address + bytes));
  madvise(address, bytes, MADV_DONTNEED);
  mprotect(address, bytes, PROT_NONE);
}

int device_of(const void* address) {
  std::lock_guard guard(mutex);
  auto next = blocks.upper_bound((char*)address);
  if (next == blocks.begin()) return -1;
  auto& [start, block] = *std::prev(next);
  return (const char*)address < start + block.bytes ? block.device : -1;
}

void* allocate_pinned(size_t bytes) {
  void* address = aligned_alloc(4096, (bytes + 4096) / 4096 * 4096);
  std::lock_guard guard(mutex);
  pinned[(char*)address] = bytes;
  return address;
}

void release_pinned(void* address) {
  std::lock_guard guard(mutex);
  pinned.erase((char*)address);
  free(address);
}

bool is_pinned(const void* address) {
  std::lock_guard guard(mutex);
  auto next = pinned.upper_bound((char*)address);
  return next != pinned.begin() && (const char*)address < std::prev(next)->first + std::prev(next)->second;
}

}  // namespace simulated

// ---- what Python reads and sets (counters.py) ----
using namespace simulated;

EXPORT long simulated_cuda_count(int which) { return counters[which].load(); }

EXPORT const char* simulated_cuda_counter(int which) { return which < COUNTERS ? NAMES[which] : nullptr; }

EXPORT void simulated_cuda_reset() {
  for (auto& counter : counters) counter = 0;
  std::lock_guard guard(mutex);
  launches().clear();
}

// An operator that computes values (values.cpp) stands for the launch of one kernel.
EXPORT void simulated_cuda_operator(const char* name) {
  count(LAUNCH);
  std::lock_guard guard(mutex);
  launches()[name]++;
}

// Lines "count kernel" into `out`, if they fit; the room that they need.
EXPORT size_t simulated_cuda_launches(char* out, size_t room) {
  std::string text;
  std::lock_guard guard(mutex);
  for (auto& [name, number] : launches()) text += std::to_string(number) + " " + name + "\n";
  if (text.size() < room) memcpy(out, text.c_str(), text.size() + 1);
  return text.size() + 1;
}

EXPORT void simulated_cuda_take(int device, size_t bytes) {
  std::lock_guard guard(mutex);
  taken_by_others[device] = bytes;
}
