/* model/checkpoint.h - the tensors of a checkpoint folder, whichever of its files hold them.
 *
 * Why      One file, shards with an index, or several files without one: the loader above sees
 *          names only.
 * Holds    Every file the index names is there and open; every tensor it names is in the file it
 *          names; no name is in two files; no file lies outside the folder.
 * Errors   TOW_ENOENT for missing files (first names, 'incomplete download'), TOW_EFORMAT, TOW_EIO.
 */
#ifndef MODEL_CHECKPOINT_H
#define MODEL_CHECKPOINT_H

#include "common/model/safetensors.h"

struct model_checkpoint;

int model_checkpoint_open(struct model_checkpoint **out, const char *dir, struct tow_err *err);
void model_checkpoint_close(struct model_checkpoint *c); /* NULL is fine; every tensor dies */

const char *model_checkpoint_dir(const struct model_checkpoint *c);
size_t model_checkpoint_count(const struct model_checkpoint *c);
const struct model_tensor *model_checkpoint_at(const struct model_checkpoint *c,
                                               size_t i); /* by name */
const struct model_tensor *model_checkpoint_find(const struct model_checkpoint *c,
                                                 const char *name);
/* Place in the order by name, or -1. */
int64_t model_checkpoint_index(const struct model_checkpoint *c, const char *name);
size_t model_checkpoint_files(const struct model_checkpoint *c);
uint64_t model_checkpoint_bytes(const struct model_checkpoint *c); /* of all files */

#endif
