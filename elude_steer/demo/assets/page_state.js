// Keeps what the page marks true to its fields. Pressed are: words of the caption that are to be removed, the words put
// instead, the edit to try and the row of the dose curve that the fields hold. Words of the caption that the shown edit
// took out are struck through. A second click on a word opens the list of what could stand there instead. When a
// visitor moves the strength of an edit, this element sends `select`.
const fields = { minus: [], plus: [], strength: null };
let clicked = null, caption = null, openList = false, waiting = null, timer = null;

const all = (selector) => document.querySelectorAll(selector);
const same = (one, other) => String(one).toLowerCase() === String(other).toLowerCase();
const has = (words, word) => words.some((one) => same(one, word));
const plain = (text) => text.toLowerCase().replace(/^[^\p{L}\p{N}_]+|[^\p{L}\p{N}_]+$/gu, '');

function press(selector, isPressed) {
  all(`${selector} [data-row]`).forEach((one) => {
    if (isPressed(JSON.parse(one.dataset.row), one)) one.setAttribute('aria-pressed', 'true');
    else one.removeAttribute('aria-pressed');
  });
}

function show() {
  waiting = null;
  const shown = document.querySelector('#plain .plain');
  if (shown !== caption) [caption, clicked] = [shown, null];
  const edit = [...fields.minus.map((word) => `\u2212 ${word}`), ...fields.plus.map((word) => `+ ${word}`)].join(' ');
  press('#plain', ({ word }) => has(fields.minus, word));
  press('#swaps', ({ instead }) => has(fields.plus, instead));
  press('#edits', (_, one) => one.textContent === edit);
  press('#doses', ({ strength }) => strength === fields.strength);
  const gone = JSON.parse(document.querySelector('#said [data-gone]')?.dataset.gone ?? '[]');
  all('#plain p:first-of-type > *').forEach((one) => {
    const words = one.textContent.split(/\s+/).map(plain);
    one.classList.toggle('gone', words.every((word) => gone.includes(word)));
  });
  const list = document.querySelector('#swaps details');
  if (list && openList) [list.open, openList] = [true, false];
}

function showSoon() { waiting ??= requestAnimationFrame(show); }

window.eludeSteerFields = (minus, plus, strength) => {
  Object.assign(fields, { minus: minus ?? [], plus: plus ?? [], strength });
  if (clicked !== null && !has(fields.minus, clicked)) clicked = null;
  showSoon();
};

// Whether a click is the second one on a word of the caption, which only opens the list.
window.eludeSteerAgain = (row) => {
  if (!row.closest('#plain')) return false;
  const { word } = JSON.parse(row.dataset.row);
  if (clicked === word) {
    openList = true;
    show();
    return true;
  }
  clicked = word;
  return false;
};

function moved(event) {
  if (!event.target.closest?.('#set-strength')) return;
  clearTimeout(timer);
  timer = setTimeout(() => { if (fields.minus.length || fields.plus.length) trigger('select', {}); }, 300);
}
document.addEventListener('change', moved);
document.addEventListener('click', (event) => { if (event.target.closest?.('#set-strength button')) moved(event); });
new MutationObserver(showSoon).observe(document.body, { childList: true, subtree: true });
