/* Write a kernel once, get it for both element types: name_f32 and name_bf16.
 *
 * A file defines SELF as its own name and includes this header where T is not defined yet; the header includes the file
 * twice more, with T the element type, NAME(x) the typed name, and LOAD and STORE between T and float.
 */
#define EXPORT __attribute__((visibility("default")))
#define JOIN2(a, b) a##_##b
#define JOIN(a, b) JOIN2(a, b)
#define NAME(a) JOIN(a, SUFFIX)

#define T float
#define SUFFIX f32
#define LOAD(p) (p)
#define STORE(v) (v)
#include SELF
#undef T
#undef SUFFIX
#undef LOAD
#undef STORE

#define T uint16_t
#define SUFFIX bf16
#define LOAD(p) pl_from_bf16(p)
#define STORE(v) pl_to_bf16(v)
#include SELF
