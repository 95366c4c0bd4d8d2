// Photos before they are sent: checked, and scaled in the browser above what the agent keeps as sent.

const SIDE_PX_MAX = 2000;
const BYTES_MAX = 18_000_000; // all photos of a message: 25 MB as base64, less some room
const KINDS = ["image/png", "image/jpeg", "image/gif", "image/webp", "image/avif", "image/heic", "image/heif"];

/** A file -> {mimeType, bytes, width, height}; throws an Error in words. */
export async function prepare(file) {
  const type = file.type || "";
  if (!KINDS.includes(type)) throw new Error(`“${file.name || "This file"}” is not a photo (png, jpeg, gif, webp, avif or heic).`);
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch { /* heic outside of Safari, or broken: sent as it is */ }
  let blob = file;
  let width = bitmap?.width;
  let height = bitmap?.height;
  const scale = bitmap ? SIDE_PX_MAX / Math.max(width, height) : 1;
  if (scale < 1) {
    width = Math.max(1, Math.round(width * scale));
    height = Math.max(1, Math.round(height * scale));
    const canvas = Object.assign(document.createElement("canvas"), { width, height });
    const paint = canvas.getContext("2d");
    paint.imageSmoothingQuality = "high";
    paint.drawImage(bitmap, 0, 0, width, height);
    const as = (kind) => new Promise((resolve) => canvas.toBlob(resolve, kind, 0.9));
    blob = await as(type === "image/png" ? type : "image/jpeg");
    if (blob && blob.size > 3_000_000) {
      paint.globalCompositeOperation = "destination-over"; // jpeg has no transparency: on white, not on black
      paint.fillStyle = "#fff";
      paint.fillRect(0, 0, width, height);
      blob = await as("image/jpeg");
    }
    if (!blob) throw new Error(`“${file.name}” could not be scaled down.`);
  }
  bitmap?.close();
  return { mimeType: blob.type || type, bytes: await blob.arrayBuffer(), width, height };
}

/** Whether the photos of one message fit; the error in words if not. */
export function tooMuch(photos) {
  const bytes = photos.reduce((sum, p) => sum + p.bytes.byteLength, 0);
  return bytes > BYTES_MAX ? `These photos have ${(bytes / 1e6).toFixed(1)} MB together; a message takes ${BYTES_MAX / 1e6} MB.` : null;
}
