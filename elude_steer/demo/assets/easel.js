// The picture: its heat maps to switch between, and a brush to mark where an added word should be.
// props.value is {views: [{name, source}], chosen}, and for another picture {fresh, box, example}: its number, a region
// to mark, and which of the examples it is. Another picture takes the old one's mark with it.
const find = (selector) => element.querySelector(selector);
const easel = find('.easel'), stage = find('.stage'), frame = find('.frame'), shown = find('.shown');
const mark = find('.mark'), ring = find('.ring'), views = find('.views'), tools = find('.tools');
const brush = find('.brush'), label = find('.tools label'), range = find('.tools input'), clear = find('.clear');
const pen = mark.getContext('2d');
let marked = false, at = null, last = null, wanted = null, latest = null;

function wipe() {
  pen.clearRect(0, 0, mark.width, mark.height);
  marked = false;
  clear.hidden = true;
}

function show(index) {
  const list = props.value?.views ?? [];
  frame.hidden = !list.length;
  tools.hidden = !list.length;
  find('.empty').hidden = !!list.length;
  find('.legend').hidden = !index;
  if (!list.length) return;
  const view = list[index];
  shown.src = view.source;
  shown.alt = index ? `where ${view.name} fires; framed: the patches that were changed` : 'the picture';
  views.replaceChildren(...(list.length < 2 ? [] : list).map((one, number) => {
    const button = document.createElement('button');
    button.type = 'button';
    button.textContent = one.name;
    button.setAttribute('aria-pressed', String(number === index));
    button.onclick = () => { show(number); views.children[number].focus(); };
    return button;
  }));
}

function draw() {
  const value = props.value ?? {};
  show(value.chosen ?? 0);
  if (!value.fresh || value.fresh === latest) return;
  latest = value.fresh;
  wipe();
  wanted = value.box?.length ? value.box : null;
  if (shown.complete) box();
  document.querySelectorAll('#examples [data-row]').forEach((one) => {
    one.setAttribute('aria-pressed', String(JSON.parse(one.dataset.row).example === value.example));
  });
}

// A recipe may bring a box, as shares of the picture.
function box() {
  if (!wanted) return;
  const [left, top, right, bottom] = wanted;
  pen.fillStyle = '#ffd640';
  pen.fillRect(left * mark.width, top * mark.height, (right - left) * mark.width, (bottom - top) * mark.height);
  wanted = null;
  marked = true;
  clear.hidden = false;
}

shown.onload = () => {
  if (mark.width !== shown.naturalWidth || mark.height !== shown.naturalHeight) {
    mark.width = shown.naturalWidth;
    mark.height = shown.naturalHeight;
    wipe();
  }
  box();
};

// ---- the brush
function size() { return Number(range.value); }

function dot(to) {
  pen.strokeStyle = pen.fillStyle = '#ffd640';
  pen.lineWidth = size();
  pen.lineCap = 'round';
  pen.beginPath();
  pen.moveTo((last ?? to).x, (last ?? to).y);
  pen.lineTo(to.x, to.y + 0.01);
  pen.stroke();
  last = to;
  marked = true;
  clear.hidden = false;
}

function place(event) {
  const box = mark.getBoundingClientRect();
  return { x: (event.clientX - box.left) * mark.width / box.width, y: (event.clientY - box.top) * mark.height / box.height };
}

function move(to) {
  at = to;
  const box = mark.getBoundingClientRect(), scale = box.width / mark.width;
  ring.hidden = false;
  ring.style.left = `${to.x * scale}px`;
  ring.style.top = `${to.y * scale}px`;
  ring.style.width = ring.style.height = `${size() * scale}px`;
}

brush.onclick = () => {
  const on = brush.getAttribute('aria-pressed') !== 'true';
  brush.setAttribute('aria-pressed', String(on));
  easel.classList.toggle('brushing', on);
  label.hidden = !on;
  ring.hidden = true;
  if (on) mark.setAttribute('tabindex', '0'); else mark.removeAttribute('tabindex');
};
clear.onclick = () => { wipe(); brush.focus(); };
mark.onpointerdown = (event) => {
  if (!event.isPrimary) return;
  mark.setPointerCapture(event.pointerId);
  last = null;
  dot(place(event));
  event.preventDefault();
};
mark.onpointermove = (event) => {
  if (!event.isPrimary) return;
  move(place(event));
  if (event.buttons) dot(place(event));
};
mark.onpointerup = () => { last = null; };
mark.onpointerleave = () => { ring.hidden = true; };
mark.onkeydown = (event) => {
  const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (!step && event.key !== ' ') return;
  event.preventDefault();
  const from = at ?? { x: mark.width / 2, y: mark.height / 2 }, far = event.shiftKey ? 4 : 16;
  const within = (value, most) => Math.min(most, Math.max(0, value));
  move(step ? { x: within(from.x + far * step[0], mark.width), y: within(from.y + far * step[1], mark.height) } : from);
  if (event.key === ' ') { last = null; dot(at); }
};

// ---- pictures that are dropped or pasted go the way of those that are chosen
function bring(files) {
  const file = [...files].find(Boolean), input = document.querySelector('input[type=file]:has(+ #bring)');
  if (!file || !input) return;
  const list = new DataTransfer();
  list.items.add(file);
  input.files = list.files;
  input.dispatchEvent(new Event('change', { bubbles: true }));
}
stage.ondragover = (event) => { event.preventDefault(); stage.classList.add('over'); };
stage.ondragleave = () => stage.classList.remove('over');
stage.ondrop = (event) => {
  event.preventDefault();
  stage.classList.remove('over');
  bring(event.dataTransfer.files);
};
// A picture dropped beside the easel would take the place of the whole page.
for (const name of ['dragover', 'drop']) document.addEventListener(name, (event) => event.preventDefault());
// Gradio keeps the list of words open after a pick, over the button that is pressed next.
document.addEventListener('pointerup', (event) => {
  if (event.target.closest?.('#minus [role=option], #plus [role=option]')) setTimeout(() => document.activeElement.blur());
});
document.addEventListener('paste', (event) => {
  const files = [...(event.clipboardData?.files ?? [])].filter((file) => file.type.startsWith('image/'));
  if (files.length) { event.preventDefault(); bring(files); }
});

// What the page sends when it is pressed: the mark, white on black, or nothing.
window.eludeSteerMark = () => {
  if (!marked) return '';
  const copy = document.createElement('canvas');
  copy.width = mark.width;
  copy.height = mark.height;
  const ink = copy.getContext('2d'), pixels = pen.getImageData(0, 0, mark.width, mark.height);
  for (let i = 0; i < pixels.data.length; i += 4) {
    pixels.data.fill(pixels.data[i + 3] > 127 ? 255 : 0, i, i + 3);
    pixels.data[i + 3] = 255;
  }
  ink.putImageData(pixels, 0, 0);
  return copy.toDataURL('image/png');
};
watch('value', draw);
draw();
