// The tags of a caption, by the commas of several scripts.
export function tagsOf(caption) {
  return caption.split(/[,\uff0c\u3001\u060c]/).map((tag) => tag.trim()).filter(Boolean);
}
